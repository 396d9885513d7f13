"""A copy of the project to which a test adds files."""


def link_tree(source, target, replaced):
    """A folder of links to another one's entries; the folders that lead to `replaced` are real."""
    target.mkdir()
    for entry in source.iterdir():
        inside = [
            path.relative_to(entry.name) for path in replaced if path.parts[0] == entry.name and len(path.parts) > 1
        ]
        if inside:
            link_tree(entry, target / entry.name, inside)
        elif entry.name not in (".git", "__pycache__"):
            (target / entry.name).symlink_to(entry)
