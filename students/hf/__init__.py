"""The student as a Hugging Face model, trained with torch in one process."""
