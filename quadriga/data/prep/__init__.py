"""`quadriga prep`: datasets in Quadriga's row format, from public sources or from nothing."""
