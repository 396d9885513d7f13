"""Human studies: design, page, files, scoring."""
