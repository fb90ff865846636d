"""Where the time of some steps goes: labels in the code, a profiler that runs for these steps, and what its traces say."""
