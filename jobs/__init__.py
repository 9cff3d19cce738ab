"""The batch job: command line, runners, Ray. What is computed is `sensitivity`'s business."""
