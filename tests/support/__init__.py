"""What several suites share: servers, programs as processes, and ways to wait for them."""
