"""Speed and memory of tokenmix against the floor and against other people's packages; see docs/guides/cost.md."""
