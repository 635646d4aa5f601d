"""Our mixers under the names and conventions of other libraries. Each module imports its library when it is used."""
