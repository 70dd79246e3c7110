"""The paper and the bookkeeping, in NumPy alone: nothing here knows of tensors, GPUs or Ray.

tree       DDTree: scores, the best-first build, the ancestor mask, following the target
sampling   addressed sampling: the token at a position is a pure function of its prefix
pages      which cache pages belong to which request
budget     how many draft nodes a request gets
acceptance what drafts are assumed to hit, where that is not found out
request    one user's ask and its progress
plan       all that passes between the driver and the verifiers
"""
