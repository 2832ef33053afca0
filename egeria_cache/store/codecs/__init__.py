"""Numbers of an activation <-> fewer bytes. Pure: no file, no thread, no global state.

`codec` chooses among the encodings and undoes them, `lossy` stores fewer bits than were computed.
"""
