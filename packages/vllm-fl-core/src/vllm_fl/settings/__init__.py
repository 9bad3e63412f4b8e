"""What is asked for: every setting, where its value comes from, and the policy that follows."""
