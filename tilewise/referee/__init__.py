"""The numeric contract as a referee for any attention: `tilewise judge NAME`. docs/judge.md says how to use it.

A call is drawn from its id alone (calls.py, features.py), so that an id makes it again anywhere. A contender computes
it in a process of its own (court.py); its numbers are compared with dense float64 attention (truth.py, verdict.py).
"""
