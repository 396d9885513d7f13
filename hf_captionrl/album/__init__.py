"""Captions that tell the images of a set apart, and the demo page."""
