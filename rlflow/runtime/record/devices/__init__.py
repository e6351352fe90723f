"""What devices did while actions ran: memory, time, clocks and tokens; asked, kept, read back."""
