"""The embedded flowers: 102 classes of pictures that the project draws once into the user's cache."""
