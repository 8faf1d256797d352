"""Evidence: records that say what was measured, what that does not prove, and whether they changed.

``record`` holds the models, ``canonical`` the bytes that are hashed and signed,
``store`` the folders on disk, ``index`` a cache for listing, ``paging`` the pieces
of a record that fit into a reply.
"""
