"""Small recurrent and spiking torch modules, one file a family; `torch_zoo` collects them."""
