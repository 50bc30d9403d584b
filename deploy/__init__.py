"""What it takes to run Paceline elsewhere than on one machine."""
