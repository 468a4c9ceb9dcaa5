"""Image files of any size: listed, checked, decoded and cached."""
