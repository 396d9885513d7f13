"""hf_captionrl"""
