"""Who may do what: roles, the tables of everything that can be asked for, and the file of tokens. Pure; the shells of
the surfaces (HTTP, gRPC, V2, segments) enforce it.

    access file --tokens.parse--> AccessTable --grant--> Grant --may(Need)--> yes or no
                                  tables of surfaces (`surfaces`) -------^

Without an access file nothing here is asked, except what a certificate of the cluster's authority may do.

Downwards:

    tokens    the access file: tokens by name, what each may do, and until when
    attempts  the bound of wrong tokens that one address may try
    surfaces  what each HTTP route, each gRPC method and each V2 command needs
    certificates  what a verified certificate grants
    roles     roles, what they imply, and what a caller was granted
"""
