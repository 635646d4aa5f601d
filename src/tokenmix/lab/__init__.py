"""The lab: data, training, tasks, comparison and the command. The library never imports the lab."""
