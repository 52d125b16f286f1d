"""What a configuration would have done to a load: the shipping scheduler under a virtual clock."""
