"""Claims, questions, judges and their audits. No promises: names, options and results may change with any release."""
