"""The lab: data, training, tasks, comparison and the command. The library outside never imports it."""
