"""Human studies: design, pages, answers, scores."""
