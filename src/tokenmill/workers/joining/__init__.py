"""Workers of other machines join a running pool: who has the token is given a link"""
