"""Loading, checking, collating and sampling captioned images."""
