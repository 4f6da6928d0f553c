"""Speed, held against what the machine allows and against other engines: `run.run_bench` measures all of it."""
