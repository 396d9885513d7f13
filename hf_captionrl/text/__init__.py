"""Tokenisation and n-gram counting."""
