"""What runs beside a device. Importing most of it imports MindSpore."""
