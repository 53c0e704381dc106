"""One Prefect task per phase: typed in and out, no arithmetic."""
