"""Any Hugging Face vision-to-text model as a captioner."""
