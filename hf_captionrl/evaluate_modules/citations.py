"""BibTeX of papers that several metrics cite."""

__all__ = ["SMILE"]

SMILE = """\
@inproceedings{yue2023smile,
  title     = {Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation},
  author    = {Yue, Zihao and Hu, Anwen and Zhang, Liang and Jin, Qin},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {36},
  year      = {2023}
}
"""
