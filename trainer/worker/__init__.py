"""One training process: builds model and data, runs the loop, evaluates, predicts, and measures itself."""
