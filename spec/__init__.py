"""What must hold: vocabulary, step families, assumptions and theorems. Imports nothing of ours."""
