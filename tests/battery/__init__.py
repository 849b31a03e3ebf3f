"""What every engine must do: one list of cases, and checks that run on each rank through the public interface."""
