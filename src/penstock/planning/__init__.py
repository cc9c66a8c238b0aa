"""How the messages of a job are planned, without any framework: measure, decide, agree, explain, watch for drift.

`planning.py` says what a user may ask for; `survey.py` measures what a plan needs, and `plan_over` in it is all of this
for ranks of MPI or of one process; `candidates.py` says what is worth measuring; `decide.py` makes the plan; `agree.py`
lets ranks agree; `explain.py` says why; `observed.py` is what iterations really took.
"""
