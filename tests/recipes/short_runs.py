"""Arguments that make the run of a recipe small."""

GENERATION = [
    *("--generation_max_new_tokens", "12", "--generation_num_beams", "2", "--use_cpu", "--disable_tqdm", "true"),
    *("--gallery_size", "4"),
]
