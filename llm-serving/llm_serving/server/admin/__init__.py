"""Routes for operators: state, live view, requests, replicas, models, reload and tuning advice."""
