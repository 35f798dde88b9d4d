"""The report: verdicts, counterexamples and their pictures as a static site."""
