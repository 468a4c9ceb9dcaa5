"""One training process: build, the loop, evaluation, prediction, what it measures of itself."""
