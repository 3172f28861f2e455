"""What a run trains on: files of samples, in an order that any number of workers keeps."""
