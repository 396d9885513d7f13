"""Captions that distinguish the images of an album, and the demo page."""
