"""Random and other searches over the settings of a recipe, shared by any number of workers."""
