"""The tools around a run: plan, report, doctor, verify_resume, evaluate, generate, profiling."""
