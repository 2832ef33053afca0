"""Numbers of an activation <-> fewer bytes. Pure: no file, no thread, no global state.

`codec` chooses among the encodings and undoes them, `planes` shuffles bytes and counts zeros,
`lossy` stores fewer bits than were computed, `gather` works on many records at a time.
"""
