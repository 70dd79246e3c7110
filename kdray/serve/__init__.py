"""HTTP: the OpenAI surface, streaming, and the Ray Serve application.

engine      what the surface needs of an engine (a protocol), and the facts it reports
fields      JSON members, read one at a time with their types checked
openai      a request body to frozen dataclasses
replies     frozen dataclasses to OpenAI's response objects
failure     every error in OpenAI's shape, with its HTTP status
middleware  exceptions to answers, keys in front of it all
keys        who may generate, and who may control
admission   bounds on the queue, by outputs and by tokens
deadline    how long a request may take
control     profiles over HTTP
text        tokens of one choice to text: partial UTF-8, stop strings, the finish reason
generation  all choices of one HTTP request, from submit to finish or abort
streaming   server-sent events, and noticing that a client left
families    metrics as data, and Prometheus text made of them
metrics     what the surface counts, and what the engine says
ray_metrics the same, mirrored into Ray's metrics
request_log one line a request
schema      what /openapi.json says about bodies and errors
app         the ASGI application over any engine; needs no Ray; surface: its routes
client      an engine client over the driver actor; profiles: its profiles; calls: how it calls
replay      an engine client that outlives gangs
backends    where an endpoint's engine comes from; progress: whether it gets on
direct      a port of the endpoint's own, past Ray Serve's proxy
deployment  the application as a Ray Serve deployment; arguments, applications: for serve's commands
"""
