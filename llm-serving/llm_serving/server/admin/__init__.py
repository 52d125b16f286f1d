"""Routes for operators: health, metrics, live view, explanations, control, replicas, reload and tuning advice."""
