"""The path of a device that runs asynchronously: what serves a model on a GPU."""
