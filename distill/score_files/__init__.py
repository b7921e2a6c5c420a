"""Scores for a file of finished answers, without a student: to filter data by, or to distil from offline.

`rows` reads and checks the answers, `asking` settles what teachers are asked and what they read, `parts` keeps what is
scored until the output is whole, and `scoring` starts the slots and drives the teachers through the file.
"""

from distill.score_files.asking import choose_spec
from distill.score_files.job import ScoreJob
from distill.score_files.scoring import Progress, Summary, score_file

__all__ = ["Progress", "ScoreJob", "Summary", "choose_spec", "score_file"]
