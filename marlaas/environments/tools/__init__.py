"""Tools that the policy calls in the middle of a conversation: how calls are written, run and answered."""
