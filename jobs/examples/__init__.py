"""Scripts that show how results are worked with, cell by cell."""
