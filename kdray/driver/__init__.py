"""The side that decides: schedules requests, drafts, builds trees, accepts, commits."""
