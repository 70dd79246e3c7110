"""HTTP: the OpenAI surface, streaming, and the Ray Serve application.

engine      what the surface needs of an engine (a protocol), and the facts it reports
fields      JSON members, read one at a time with their types checked
openai      a request body to frozen dataclasses
replies     frozen dataclasses to OpenAI's response objects
failure     every error in OpenAI's shape, with its HTTP status
text        tokens of one choice to text: partial UTF-8, stop strings, the finish reason
generation  all choices of one HTTP request, from submit to finish or abort
streaming   server-sent events, and noticing that a client left
metrics     Prometheus text
schema      what /openapi.json says about bodies and errors
app         the ASGI application over any engine; needs no Ray
client      an engine client over the driver actor
deployment  the application as a Ray Serve deployment
"""
