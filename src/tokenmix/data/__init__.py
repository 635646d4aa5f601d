"""What is shared by the readers of all data: fetching, the cache, the order of samples and the loader."""
